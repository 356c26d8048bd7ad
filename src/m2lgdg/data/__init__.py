"""What do I have, and what is wrong with it: readers, atlases, checks, duplicates, leakage, synthetic cohorts."""
