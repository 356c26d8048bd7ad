"""The bridge to scikit-learn, in both directions: `as_estimator` and `from_sklearn`."""
