"""One file an idea. Every module here is imported by `m2lgdg.method.load_methods`, so a new file is a new method."""
