"""`python -m braidax` is `braidax`."""

from braidax.cli import main

if __name__ == "__main__":
    main()
