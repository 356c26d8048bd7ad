"""Leave-one-site-out studies: study files, cells, the runner and its engines, predictions, statistics, audit."""
