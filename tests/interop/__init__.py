"""Do other packages, torch's pipelines first, work with sherd's modules?"""
