"""Tables by rows against what else there is: step time, memory, and what goes over the wire."""
