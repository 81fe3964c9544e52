"""How rows travel between the devices that use them and those that own them."""
