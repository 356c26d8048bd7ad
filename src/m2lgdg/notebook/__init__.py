"""Work in a notebook: cohorts from arrays and data frames, subjects by slices and queries, objects shown as HTML."""
