"""Data: readers, atlases, quality checks, duplicate scans, leakage checks and synthetic cohorts."""
