"""Tables and pages made from a study's predictions; nothing here touches a cohort or a model."""
