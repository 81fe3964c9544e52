"""Tables that grow, as a server has them."""
