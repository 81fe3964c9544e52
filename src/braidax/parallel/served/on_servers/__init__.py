"""What a rank of a gang has of tables and variables, and how it answers."""
