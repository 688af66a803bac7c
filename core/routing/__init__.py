"""Which engine a request goes to, and whether it is admitted at all."""
