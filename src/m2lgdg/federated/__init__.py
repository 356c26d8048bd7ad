"""Federated training at hospitals that keep their subjects: `connectome-adaptive` from sums over sites."""
