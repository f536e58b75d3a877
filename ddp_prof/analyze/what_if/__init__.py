"""Predict from one capture by how much another bucket size, gradient views or a faster network changes a step."""
