"""One file an idea. `m2lgdg.registry` finds each `@method("name")` at the start of a line: a new file is a new method."""
