"""The commands of the terminal, one module a topic; imported by `m2lgdg.cli`."""
