"""The instruments of The Mesh Book, one subject a module; import them by module."""
