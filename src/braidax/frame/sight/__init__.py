"""What a plan did: rows, bytes and seconds of each operation on each rank."""
