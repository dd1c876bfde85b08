"""What objects keep in a way of their own: its plain form, how to take a load back, how to compare. Imports core alone."""
