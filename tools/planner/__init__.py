"""Published measurements as inputs of the cost model, and the fit of its constants."""
