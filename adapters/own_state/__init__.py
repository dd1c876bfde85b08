"""Handles the state that objects keep in their own ways: converts it to a plain form, undoes a load, compares. Imports only core."""
