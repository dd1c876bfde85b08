"""The native format on a store: headers, tensors read, tensors written. May import `stores`."""
