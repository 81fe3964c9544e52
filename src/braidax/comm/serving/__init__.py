"""`Communicator.ask` and `serve`: requests of any rank, and answers."""
