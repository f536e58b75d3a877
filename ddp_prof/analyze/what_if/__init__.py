"""What another bucket size, views or a faster network would change in a step: predicted from one capture."""
