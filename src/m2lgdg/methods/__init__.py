"""The classifiers, one file per idea. `m2lgdg.registry` lists every `@method("name")` that starts a line of these files."""
