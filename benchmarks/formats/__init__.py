"""Every format that is read, beside the library that defines it or reads it elsewhere."""
