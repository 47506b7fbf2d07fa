"""Where tensors lie: copying whole structures to a device, refusing what would move or convert by itself, barriers."""
