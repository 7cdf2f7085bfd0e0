"""`python -m ringspan` is `ringspan`."""

from ringspan.cli import main

if __name__ == "__main__":
    main(prog_name="ringspan")
