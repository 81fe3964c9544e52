"""Who reads what: from the shardings of a batch to plans of reads."""
