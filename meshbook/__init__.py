"""The instruments of The Mesh Book, one package a subject: proofs, hlo, planning, and so on."""
