"""Values: what nodes have made, which ranks have it, who will read it, and what must be made again."""
