"""The operations of a forward pass: one interface, several implementations."""
