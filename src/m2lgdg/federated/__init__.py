"""Federated training: `connectome-adaptive` fitted at hospitals that keep their subjects, from sums over each site."""
