"""Sending edits to a server: what is sent, when, by whom, and what came back."""
