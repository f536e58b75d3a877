"""What a device spent its time on: kernels, what hid communication, why it was idle."""
