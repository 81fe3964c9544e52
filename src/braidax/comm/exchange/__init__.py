"""`Communicator.exchange`: streams between all ranks, in bounded memory."""
