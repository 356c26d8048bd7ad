"""Does it work at a site never seen: study files, cells, the runner and its engines, predictions, statistics, audit."""
