"""Ready-made tasks: data, model, loss and optimizer, for `braidax train` and as examples."""
