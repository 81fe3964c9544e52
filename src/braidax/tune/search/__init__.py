"""Which mesh and which strategies: all of them are priced by a model, and the best are compiled and measured."""
