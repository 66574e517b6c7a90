"""One module per link: frozen, tagged msgspec structs. No pickle ever crosses a process."""
