"""Events: what they are called, how they are laid out and switched; static, syscall and marker events."""
