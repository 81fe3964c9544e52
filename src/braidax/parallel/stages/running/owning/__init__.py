"""Which stage has which variables: owners, the form of the divided tree, what rows may be, what microbatches change."""
