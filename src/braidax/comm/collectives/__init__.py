"""The algorithms: generators that begin operations and yield what they wait for. They know nothing of threads."""
