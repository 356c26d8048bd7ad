// The page works without this script, which only reports a too large file early and shows that a prediction is running.
"use strict";
const form = document.querySelector("form");
const files = form.querySelectorAll("input[type=file]");
const button = form.querySelector("button");
const ready = button.textContent;
const check = (file) => {
  const most = Number(file.dataset.largest);
  const large = [...file.files].some((one) => one.size > most);
  file.setCustomValidity(large ? `${file.multiple ? "A" : "This"} file is larger than ${Math.round(most / 1048576)} MB.` : "");
};
for (const file of files) {
  file.addEventListener("change", () => { check(file); file.reportValidity(); });
  for (const name of ["dragenter", "dragover"]) file.addEventListener(name, () => file.classList.add("over"));
  for (const name of ["dragleave", "drop"]) file.addEventListener(name, () => file.classList.remove("over"));
}
form.addEventListener("submit", () => { button.disabled = true; button.textContent = "Computing …"; });
addEventListener("pageshow", () => { button.disabled = false; button.textContent = ready; files.forEach(check); });
