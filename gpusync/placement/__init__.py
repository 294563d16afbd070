"""Where checkpoint tensors live in a model: regions, slices, and what the model's own loader shows."""
