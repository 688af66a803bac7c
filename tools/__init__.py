"""Command-line tools of the project; nothing at run time imports them."""
