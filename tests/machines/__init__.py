"""Do ranks on several machines train together, and what do they see when the link between them goes?"""
