"""The state that objects keep in their own ways: its plain form, how to undo a load, how to compare. Imports only core."""
