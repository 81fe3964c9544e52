"""ArrayRecord: chunks of Riegeli, of one record each or many, and a list of them at the end of the file."""
