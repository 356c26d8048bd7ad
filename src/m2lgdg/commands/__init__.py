"""The commands of the terminal, one module per command; imported by `m2lgdg.cli`."""
