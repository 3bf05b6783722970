"""What people and programs read: the certificate and the terminal."""
