"""Rows and gradients of rows in fewer bits than they are kept in, while they travel."""
