// Each explorer of a page (bookkit/explorer.py) holds every picture it can show. Its controls choose one.

function startExplorer(root) {
  const find = selector => root.querySelector(selector);
  const controls = root.querySelectorAll("input, select");
  const data = JSON.parse(find('script[type="application/json"]').textContent);
  const show = () => {
    let k = 0;
    controls.forEach((control, i) => {
      const labels = data.labels[i], label = labels[control.value];
      k = k * labels.length + Number(control.value);
      if (control.type !== "range") return;
      control.setAttribute("aria-valuetext", label);
      control.closest(".explorer-control").querySelector("output").textContent = label;
    });
    const [picture, caption] = data.frames[k];
    find(".explorer-view").innerHTML = picture;
    find(".explorer-caption").textContent = caption;
  };
  controls.forEach(control => Object.assign(control, {disabled: false, oninput: show}));
  show();
}

document.addEventListener("DOMContentLoaded", () =>
  document.querySelectorAll(".explorer").forEach(startExplorer));
