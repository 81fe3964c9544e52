"""What the user gives: the loss, what makes the first parameters, arrays, the mark of a gradient."""
