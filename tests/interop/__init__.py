"""Do other packages work with sherd's modules? `make test-interop` installs them."""
